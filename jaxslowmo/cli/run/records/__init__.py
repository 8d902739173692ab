"""What a run tells of itself: records of its steps, in files and on the terminal."""
