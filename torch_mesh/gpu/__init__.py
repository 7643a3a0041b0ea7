"""Experts on GPUs: how many fit, which ones, their placement, and forwards in progress there."""
