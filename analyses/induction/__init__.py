"""Heads that complete A B … A with B: what they read and copy, who feeds them, and what they are needed for."""
