"""How requests leave for reward endpoints: rules, connections, retries, signatures."""
