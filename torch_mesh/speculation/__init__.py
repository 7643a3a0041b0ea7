"""Speculative decoding: several tokens of a text in one forward, drafters, draft lengths, and rewinding caches."""
