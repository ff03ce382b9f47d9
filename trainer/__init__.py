"""The loop: collects rollouts, assigns credit, updates the policy, and times every phase of it."""
