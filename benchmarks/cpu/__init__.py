"""Speed, memory and accuracy on this machine's processor."""
