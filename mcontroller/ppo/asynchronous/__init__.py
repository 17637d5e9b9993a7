"""Generation by trajectory beside training: the queue of groups, the order of events, the balance of both sides."""
