"""A policy loss for rlx that balances pushes up against pushes down."""
