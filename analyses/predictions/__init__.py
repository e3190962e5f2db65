"""What a prediction is made of: what every depth would predict, and what every part writes towards it."""
