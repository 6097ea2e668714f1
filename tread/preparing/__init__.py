"""From sources to datasets: photos, captions, other people's latents, embedded sets."""
