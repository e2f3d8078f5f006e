"""One small interface over CPU and CUDA ranks."""
