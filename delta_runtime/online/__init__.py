"""What to take out of device memory: ledger, filters, policies. No torch, no clock, no threads."""
