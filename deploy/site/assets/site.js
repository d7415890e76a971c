// What is wider than the page can be scrolled from the keyboard.
function makeReachable() {
  for (const wide of document.querySelectorAll("pre > code")) {
    if (wide.scrollWidth > wide.clientWidth) wide.tabIndex = 0;
    else wide.removeAttribute("tabindex");
  }
}
makeReachable();
window.addEventListener("load", makeReachable);
window.addEventListener("resize", makeReachable);
