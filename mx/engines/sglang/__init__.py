"""SGLang starts from other replicas, or from a peer with a checkpoint, and lends what it loads.

Name a model in `--model-loader-extra-config '{"mx_peer": {"model": NAME}}'`. SGLang finds the
plugin by its entry point. docs/vllm.md has the rest, and says what was tried.
"""
