"""What `train.doctor` finds out about the machine it runs on."""
