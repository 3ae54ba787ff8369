"""NCCL: what it takes of a card outside torch's allocator, and how long its collectives take. Pure functions.

- `communicator_log.CommunicatorLog`: what a rank asks of NCCL, gathered into its communicators.
- `nccl_memory.process_memory`: what these take of the card, by parts with sources.
- `nccl_host_memory.process_host_memory`: what they take of the host.
- `collective_times.collective_seconds`: how long one collective takes.
- `nccl_settings.NcclSettings.from_environ`: the settings of the environment.
- `node_types.usual_node`: what is assumed of the machine around a card.
"""
