"""Events to servers: what each engine's lines mean, engine by engine and wording by wording."""
