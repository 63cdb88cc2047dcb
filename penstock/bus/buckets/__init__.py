"""What lives in key-value buckets: leases, locks, registers, and watching them."""
