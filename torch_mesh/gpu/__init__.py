"""Experts on GPUs: how many fit, which ones, putting them there, and what forwards have under way there."""
