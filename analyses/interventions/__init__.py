"""What is done to a run of a model, and what is read off it, many variants at a time."""
