"""What tests of several rooms share: places, runs, people, faults. Each idea stands here once."""
