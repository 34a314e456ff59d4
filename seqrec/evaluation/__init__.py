"""Evaluation: ranking, metrics, intervals, comparisons, the leaderboard."""
