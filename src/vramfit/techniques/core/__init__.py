"""What every technique is made of: the protocol, settings, promises, and programs that techniques are attached to."""
