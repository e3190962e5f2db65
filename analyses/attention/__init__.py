"""What every head attends to: its statistics and scores, and its pattern at any length."""
