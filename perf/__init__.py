"""Benchmarks. They may import anything of the project; nothing of it imports them."""
