"""Several tokens of a text in one forward: who drafts them, how many, and how a cache goes back to before those that were wrong."""
