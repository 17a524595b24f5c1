"""Actuators of links, RNICs, routes and packets."""
