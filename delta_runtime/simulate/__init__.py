"""What a recorded step would do on a device that is not there: nothing runs, nothing is allocated."""
