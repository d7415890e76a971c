"""The server's log: lines as text or JSON, lines about failed calls, and a summary every minute."""
