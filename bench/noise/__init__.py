"""Decisions on noise with a known truth: generators, and how often the product is wrong on them."""
