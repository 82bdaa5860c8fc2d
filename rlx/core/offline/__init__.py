"""Offline training: objectives on fixed data, from rows to the scalar that is differentiated."""
