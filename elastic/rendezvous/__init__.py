"""How nodes become a round: pure decisions, one contract for the agent, and the ways to fulfil it."""
