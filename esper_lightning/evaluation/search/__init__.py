"""Search for fixed schedules and the value of information."""
