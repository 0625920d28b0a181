"""Known bugs of distributed training, each planted in place of right code for a while to see that proofs find it."""
