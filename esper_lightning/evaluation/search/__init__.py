"""Search for fixed schedules."""
