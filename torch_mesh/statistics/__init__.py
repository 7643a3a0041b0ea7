"""Statistics of pools: counted, shown, written to a file and read back."""
