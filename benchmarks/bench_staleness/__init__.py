"""What staleness costs and buys, with and without correction: the demo task at several bounds."""
