"""What fills `results/`: measurements that are run once and written down."""
