"""What starts agents on hosts: the launcher, ssh, or a step of a scheduler; and the connections to them."""
