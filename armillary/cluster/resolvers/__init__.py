"""What each scheduler tells a process: which one it is, of how many, and who leads."""
