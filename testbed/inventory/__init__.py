"""Ansible inventories: read, checked, audited, and written for the labs that we offer."""
