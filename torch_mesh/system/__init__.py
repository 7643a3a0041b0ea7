"""The machine under the process: its memory, its threads, its files and its clock."""
