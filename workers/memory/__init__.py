"""Memory of the roles: measured during their calls, and estimated from configuration and layout."""
