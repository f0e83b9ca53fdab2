"""Load runs: what Carillon reaches on this machine, measured from outside."""
