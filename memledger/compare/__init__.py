"""Two or more runs side by side: what differs, and the waterfall from one capacity to the other (`memledger compare`)."""
