"""What every part needs: processes and devices, files and checkpoints, parts by name, output on the terminal."""
