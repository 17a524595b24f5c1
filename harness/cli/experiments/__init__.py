"""Commands about experiments and faults: run, inject, compare, attribute, shrink."""
