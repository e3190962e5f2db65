"""Where attention rests when it has nothing to read, what that key is like, and what it is for."""
