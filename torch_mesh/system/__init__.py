"""The machine under the process: its memory, threads, files and clock."""
