"""What ends when nobody deletes it, by a simulated clock and with clients that die."""
