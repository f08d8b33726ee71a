"""What a training reports: times, speed, arithmetic, stragglers."""
