"""Searches by CP-SAT for a better plan, or a better bound, where the planner leaves a gap. They begin from its plan."""
