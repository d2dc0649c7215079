"""PyTorch's operators on the software accelerator."""
