"""Sharing a lab: reservations, leases, the audit log, and marks of labs that are being changed or DIRTY."""
