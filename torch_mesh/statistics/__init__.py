"""What pools have done: counted, shown, written to a file and read back."""
