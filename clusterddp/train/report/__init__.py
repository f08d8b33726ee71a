"""What is told of a training: times, speed, arithmetic, who holds the others up."""
